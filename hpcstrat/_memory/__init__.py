"""Memory: slabs, files that ranks share, variables' blocks, the layout of messages."""
