"""Loops in C for a CPU, where small matrices make torch's operations cost more than their arithmetic."""
