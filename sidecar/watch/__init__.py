"""Watch one member: which ranks are late, how long they compute, and whether the launcher responds."""
