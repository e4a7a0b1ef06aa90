"""`HPCSTRAT_TIMELINE=trace.json`: what every rank does and when, in one trace for Perfetto.

Without the variable, nothing here is imported, and no call takes a microsecond longer.
"""
