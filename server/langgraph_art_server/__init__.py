"""The training server: serves a base model with vLLM, records every call, trains LoRA adapters and hot-swaps them."""
