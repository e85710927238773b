<?php
return 'neighbour';
