"""The agent's loop: sensor threads, inbox, evaluation, the saved state, and the changes to report."""
