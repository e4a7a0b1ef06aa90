"""`hpcstrat timeline`: what the steps of a program spend their time on."""
