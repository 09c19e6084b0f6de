"""Checkpoints that several members write together."""
