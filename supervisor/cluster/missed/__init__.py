"""Replace pods that the webhook missed and that a supervised job lacks."""
