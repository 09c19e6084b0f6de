"""Decides what a job does next, which state follows, and what each member is ordered to do. Pure."""
