"""vLLM as an engine: its scheduler, paged cache and kernels; what is sampled and reported is Winnow's."""
