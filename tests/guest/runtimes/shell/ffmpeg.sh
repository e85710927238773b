# ffmpeg: makes a video, converts it, and looks at its frames.
set -eu
cd "$(mktemp -d)"
run="ffmpeg -hide_banner -loglevel error -nostdin -y"
$run -f lavfi -i testsrc=size=160x120:rate=10:duration=1 -f lavfi -i sine=frequency=440:duration=1 \
    -c:v mpeg4 -c:a aac -shortest -fflags +bitexact -flags bitexact -threads 2 video.mp4
$run -i video.mp4 -vf scale=80:60,hue=s=0 -an -threads 2 -f framemd5 -
$run -i video.mp4 -vn -ar 8000 -f wav sound.wav
ffprobe -v error -show_entries stream=codec_name,width,height,sample_rate,nb_frames -of csv video.mp4 sound.wav 2>/dev/null || \
    ffprobe -v error -show_entries stream=codec_name,width,height,sample_rate,nb_frames -of csv video.mp4
$run -i video.mp4 -frames:v 1 frame.png; file frame.png 2>/dev/null || head -c 4 frame.png | tail -c 3
