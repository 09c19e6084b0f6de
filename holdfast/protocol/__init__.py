"""What processes exchange: messages, progress pages, environment variables, and the rules about steps."""
