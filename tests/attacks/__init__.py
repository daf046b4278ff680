"""What strangers try, run against the real thing: each test is an attack that must cost its
author alone.
"""
