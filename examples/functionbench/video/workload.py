"""Video processing with OpenCV: makes a video gray, frame by frame."""

import os

import cv2

VIDEO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "video.avi")
GRAY = "/tmp/gray.avi"


def run(frames=60):
    source = cv2.VideoCapture(VIDEO)
    size = tuple(int(source.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    target = cv2.VideoWriter(GRAY, cv2.VideoWriter_fourcc(*"MJPG"), 20, size)
    done, light = 0, 0.0
    while done < frames:
        good, frame = source.read()
        if not good:
            break
        gray = cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY)
        target.write(cv2.cvtColor(gray, cv2.COLOR_GRAY2BGR))
        light += float(gray.mean())
        done += 1
    source.release()
    target.release()
    written = os.path.getsize(GRAY)
    os.remove(GRAY)
    return {"frames": done, "size": size, "light": round(light / max(done, 1)), "bytes": written}
