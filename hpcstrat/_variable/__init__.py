"""`Variable`: an array that all replicas share."""
