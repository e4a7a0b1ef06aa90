"""Memory for variables and messages: segments that grow on demand, who has which bytes, the blocks of variables."""
