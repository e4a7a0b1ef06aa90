"""`hpcstrat timeline`: what the steps of a timeline spend their time on."""
