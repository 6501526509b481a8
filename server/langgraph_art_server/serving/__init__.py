"""Serving: the vLLM process, the adapters loaded into it, and the gateway in front of it."""
