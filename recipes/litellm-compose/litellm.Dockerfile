FROM python:3.11-slim
COPY locks/litellm-1.106.12-cp311-linux_x86_64.txt /lock.txt
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r /lock.txt
# the hook needs the standard library alone
COPY agentguard /opt/guard/agentguard
ENV PYTHONPATH=/opt/guard HOME=/tmp
