"""The sidecar of a member, which watches the ranks, holds the snapshots and reports to the supervisor."""
