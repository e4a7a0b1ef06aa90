"""Who is where: a thread on every rank that ends the job where ranks would wait for each other for ever."""
