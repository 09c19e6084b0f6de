"""Replace pods that the webhook missed and for which a supervised job waits."""
