"""What happens to a pod when it is created: whether Holdfast takes part in it, and what is added to it."""
