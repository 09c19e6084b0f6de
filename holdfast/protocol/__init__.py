"""What processes exchange (messages, progress pages and environment variables), and the rules about steps."""
