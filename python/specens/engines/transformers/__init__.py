"""Members that are Hugging Face causal LMs."""
