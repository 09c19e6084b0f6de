"""A member's sidecar: watches the ranks, holds the snapshots and reports to the supervisor."""
