"""OpenAI's endpoints, with the fields that vLLM adds to them."""
