"""How arrays and objects move between replicas."""
