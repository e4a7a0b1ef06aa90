"""What every layer uses: dtypes, values, nests, arrays, GPUs, the name of the public call."""
