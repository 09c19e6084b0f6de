"""The sidecar: one per member, it watches the ranks, holds the snapshots, and reports to the supervisor."""
