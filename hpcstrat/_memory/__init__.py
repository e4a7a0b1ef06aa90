"""Where bytes are: segments that grow on demand, allocators, the blocks of variables, the layout of messages."""
