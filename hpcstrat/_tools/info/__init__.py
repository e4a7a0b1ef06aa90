"""`hpcstrat info`: what is installed and visible, and what is wrong with it."""
