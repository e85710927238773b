# Makes a user that the sandbox does not have. Programs for that differ from image to image, so this
# writes the files itself.
name=$1
[[ $name =~ ^[A-Za-z_][A-Za-z0-9_.-]*$ ]] || { echo "$name is no name of a user" >&2; exit 1; }
[ "$name" != root ] || exit 0
largest=999
while IFS=: read -r known _ number _; do
    [ "$known" = "$name" ] && exit 0
    [ "$number" -gt "$largest" ] && [ "$number" -lt 60000 ] && largest=$number
done </etc/passwd
while IFS=: read -r known _ number _; do
    [ "$known" = "$name" ] && group=$number
    [ "$number" -gt "$largest" ] && [ "$number" -lt 60000 ] && largest=$number
done </etc/group
number=$((largest + 1))
home=/home/$name
set -e
[ -n "${group-}" ] || echo "$name:x:$number:" >>/etc/group
echo "$name:x:$number:${group-$number}::$home:/bin/bash" >>/etc/passwd
[ ! -e /etc/shadow ] || echo "$name:!::0:99999:7:::" >>/etc/shadow
if [ ! -e "$home" ]; then
    mkdir -p "$home"
    [ ! -d /etc/skel ] || cp -r /etc/skel/. "$home"
    chown -R "$number:${group-$number}" "$home"
fi
