"""The Supervision of a job: what it contains, who may write it, and the state for the next supervisor."""
