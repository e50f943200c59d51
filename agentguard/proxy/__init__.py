"""A LiteLLM proxy in front of the guard's gateway: its environment, its configuration, its process."""
