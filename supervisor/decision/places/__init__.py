"""Where the ranks of a generation run: on which members, away from departing ones, with which backups."""
