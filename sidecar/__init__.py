"""The sidecar of a member: watches the ranks, holds the snapshots, and reports to the supervisor."""
