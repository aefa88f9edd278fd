#!/usr/bin/env bash
# Succeed where an NVIDIA GPU and its driver are there.
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU
