"""`hpcstrat info`: what is here, and what is wrong with it."""
