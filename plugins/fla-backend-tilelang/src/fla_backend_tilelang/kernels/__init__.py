# SPDX-License-Identifier: MIT
"""TileLang programs. Importing one of these modules imports tilelang."""
