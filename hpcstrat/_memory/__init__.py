"""Memory: segments that grow on demand, allocators, variables' blocks, the layout of messages."""
