"""The engine in this process: the Hugging Face model, with its KV cache kept across turns."""
