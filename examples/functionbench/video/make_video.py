"""Draws video.avi: three seconds of a ball that crosses a gradient."""

import sys

import cv2
import numpy

WIDTH, HEIGHT, FRAMES = 320, 240, 60

writer = cv2.VideoWriter(sys.argv[1], cv2.VideoWriter_fourcc(*"MJPG"), 20, (WIDTH, HEIGHT))
across = numpy.linspace(0, 255, WIDTH, dtype=numpy.uint8)
background = numpy.dstack([numpy.tile(across, (HEIGHT, 1))] * 2 + [numpy.full((HEIGHT, WIDTH), 64, numpy.uint8)])
for number in range(FRAMES):
    frame = background.copy()
    cv2.circle(frame, (number * WIDTH // FRAMES, HEIGHT // 2), 30, (40, 200, 250), -1)
    writer.write(frame)
writer.release()
