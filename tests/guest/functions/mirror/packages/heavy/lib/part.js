exports.NAME = 'part';
