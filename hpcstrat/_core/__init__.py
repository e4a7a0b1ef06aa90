"""The nouns that every floor uses: dtypes, values, nests, arrays, GPUs, the name of the public call."""
