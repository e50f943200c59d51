"""`python -m agentguard`."""

from agentguard.cli import main

if __name__ == "__main__":
    main()
