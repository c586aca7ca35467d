"""Paged, quantized key/value caches: schemes, canonical quantization, pages and their owner. See docs/kv-cache.md."""
