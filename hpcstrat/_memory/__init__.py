"""Memory for variables and messages: segments that grow on demand, allocators, the blocks of variables."""
