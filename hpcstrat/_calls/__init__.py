"""One collective call: what each rank says of it, how all wait, and how all fail together."""
