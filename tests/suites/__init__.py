"""Checks that several implementations pass, and what tests share."""
