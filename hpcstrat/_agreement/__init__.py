"""One collective call: what each rank says about it, how all wait, and how all fail together."""
