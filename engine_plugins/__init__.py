"""What agentguard adds inside the inference engine: verification rules, and the vLLM plugin that runs them."""
