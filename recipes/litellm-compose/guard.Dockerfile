FROM vllm/vllm-openai:v0.32.0
COPY . /src
RUN pip install --no-cache-dir "/src[engine,gateway]"
ENV VLLM_USE_V2_MODEL_RUNNER=0
ENTRYPOINT []
