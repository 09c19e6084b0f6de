"""How one rank protects its state: when the state is copied, where to, and what is noticed meanwhile."""
