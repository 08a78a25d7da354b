"""Device memory: the page pool, the KV cache, shared prefixes, recorded graphs."""
